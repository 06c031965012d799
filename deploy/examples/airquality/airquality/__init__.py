"""Forecast of fine dust by street sensors."""
