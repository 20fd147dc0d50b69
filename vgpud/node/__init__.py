"""The one writer: request, choice, intent, effect, commit."""
