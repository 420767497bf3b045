"""What message bodies say, as columns of an archive: JSON, Avro, Protocol Buffers and text (docs/formats/archive.md)."""
