"""The command line: one module a command, loaded when it is called; ``tiered.cli.frame`` holds them together."""
