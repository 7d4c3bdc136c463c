"""What was computed, kept and compared: verify (layouts), steplog (every step), replay and diff (runs)."""
