"""What ``tiered bench`` measures, each figure beside the plain thing that it cannot beat."""
