"""`fuse-losses bench`: workloads, peers, floors and records."""
