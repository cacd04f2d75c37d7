"""Which numbers of a forward pass come from which inputs."""
