"""The words of the house: frozen dataclasses, enums, units of measure and numbered errors."""
