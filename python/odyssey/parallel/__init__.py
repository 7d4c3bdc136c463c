"""Which bytes are added when: `plan` decides (pure functions), `reduction` does (a short loop over the plan)."""
