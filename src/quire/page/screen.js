/**
 * What the screen is like: words and layout depend on it.
 */
const narrow = matchMedia("(max-width: 900px)"); // as in style.css

/** Return whether chat and X-ray are pages of their own, as on a phone. */
export const isNarrow = () => narrow.matches;
export const isTouch = matchMedia("(pointer: coarse)").matches;
/** Return the verb of a finger or a pointer. */
export const tap = isTouch ? "Tap" : "Click";
