"""Looks into a store from outside, for operators: reports, history, simulated crashes, repair and rescue."""
