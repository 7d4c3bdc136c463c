"""A run to look at: its journal, timelines, report, and the terminal view of `odyssey top`."""
