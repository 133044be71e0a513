"""The `fuse-losses` command."""
