"""The recorded file: formats, names, shapes."""
