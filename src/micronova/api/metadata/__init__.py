"""The metadata service: what a guest reads at http://169.254.169.254/, through its network's proxy."""
