"""The front door: HTTP in, tokens through, text out. Imports of ours: protocol and the files of controller."""
