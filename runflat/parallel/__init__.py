"""Inside a replica and between replicas: sharded layers, loss, gradient sync, optimizer, process groups (torch)."""
