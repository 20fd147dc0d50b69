"""Pure decisions: which device and mode, which MIG placement, which steps."""
