"""Compiled physical batches."""
