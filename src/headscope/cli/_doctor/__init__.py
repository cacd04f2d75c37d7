"""What ``headscope doctor`` examines."""
