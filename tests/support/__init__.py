"""Fakes that more than one test needs. They speak the real contracts or drive the real core; none of them answers from a can."""
