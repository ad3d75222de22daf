"""Two kernel tables side by side: which op of a plan is the first whose results differ."""
