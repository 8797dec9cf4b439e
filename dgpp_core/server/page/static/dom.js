// Elements without templates.

/** The element with this id. */
export const $ = (id) => document.getElementById(id);

/** A new element; children are elements or texts. */
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const numbers = new Intl.NumberFormat("en");

/** A whole number with separators. */
export const count = (value) => numbers.format(Math.round(value));

/** A share in percent; "-" of nothing. */
export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part < whole ? 1 : 0)} %` : "-");

/** A message as a sentence. */
export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?)]$/.test(text) ? "" : ".");

/** A JSON value from the browser's storage, or a default where there is none or it is broken. */
export function stored(storage, key, otherwise) {
  try {
    return JSON.parse(storage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}
