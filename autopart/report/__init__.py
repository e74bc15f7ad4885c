"""Plans, programs and timelines as text, SVG and traces.

May enter: functions from a language to something readable. They compute nothing new.
"""
