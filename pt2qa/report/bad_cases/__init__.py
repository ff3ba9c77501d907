"""The samples that lose most, with their inputs."""
