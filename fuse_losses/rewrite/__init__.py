"""The only place that changes a graph."""
