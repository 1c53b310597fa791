"""What people run beside training: checks, plans, data, rewards and their command line."""
