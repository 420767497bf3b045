"""What Spark's door (``tiered.archive.datasource``) opens: an archive, or a tier itself, as batches and as streams."""
