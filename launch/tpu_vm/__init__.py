"""Cloud TPU VMs by queued resources: create, set up, train, delete."""
