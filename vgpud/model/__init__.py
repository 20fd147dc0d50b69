"""The data model: frozen dataclasses, enums, units of measure and numbered errors."""
