"""The report of a run.

gather     trace -> report data -> JSON, Markdown, HTML
data       contents of a report as plain data
breakdown  parts of a step: compute, transfer, waiting, bubble, data
excerpt    steps and ranks of the timeline
html       the HTML page
style      colours, style sheet, script
charts     step times and breakdown as SVG
grid       ranks as an SVG grid
timeline   the timeline as SVG
markdown   the Markdown page
"""
