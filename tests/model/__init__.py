"""Tests of megaspan.model."""
