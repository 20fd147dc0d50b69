"""./dev demo: vgpud's main functions from end to end, as a user sees them, with every claim checked."""
