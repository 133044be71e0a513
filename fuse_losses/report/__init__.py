"""What was found, what was fused, what was left alone and why."""
