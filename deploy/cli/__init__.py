"""The command `glm`."""
