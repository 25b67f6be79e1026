"""Inside one group: the cyclic order with its certificate, permits, and the migration of long tails."""
