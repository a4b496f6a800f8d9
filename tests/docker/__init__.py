"""The images and the compose file on a real Docker engine: `make test-docker`."""
