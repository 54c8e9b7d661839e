"""Trainers: TRL's own, with one hook changed. Shared machinery in files, one method a folder."""
