"""Tests of the worker's rooms."""
