"""Fakes and small models that more than one test needs. Fakes speak the real contracts or drive the real core; none answers from a can."""
