"""./dev demo: the main job, end to end, as a user would do it, with every claim checked."""
