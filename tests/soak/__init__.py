"""Campaigns against what must never be lost or believed: ``make soak`` runs them, minutes long; tests, seconds long."""
