"""A page, JSON and Prometheus metrics of a running cluster scheduler."""
