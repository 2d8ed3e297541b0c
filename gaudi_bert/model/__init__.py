"""Descriptions of models that do not depend on a framework: sizes, variables with their initial values, and heads."""
