"""What must outlive the controller, as Redis or Valkey keeps it: names, jobs, the leader's lease, limits of tenants."""
