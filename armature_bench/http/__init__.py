"""Load generators and HTTP clients."""
