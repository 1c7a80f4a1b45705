"""Pure decisions: mode and draft length, page selection, suffix lookup."""
