"""Pictures of schedules, round by round: as text, as SVG, and as a page that one steps through.

`rounds` runs the schedules of all ranks and says what each rank holds after each round; `shape`
recognizes trees and rings; `text`, `svg` and `page` draw; `show` is `pycoll.show`. What is drawn is
what runs: the same functions of `pycoll.schedules`, or a user's own.
"""
