"""What ``tiered bench`` measures, each figure beside the plain operation that bounds it."""
