"""Decisions as functions of read-only views: who runs where, who is sent where, who must wait, who is refused. Pure."""
