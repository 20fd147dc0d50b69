"""./dev demo shows vgpud's main functions from end to end, as a user sees them, and checks every claim."""
