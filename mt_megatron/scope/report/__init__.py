"""Reports of a recording.

gather   what the page shows, as plain values
charts   lines and heat maps
style    style sheet and script
html     the page
compare  first step and module at which two runs part
status   state of a recording
"""
