// Replies as elements. Text only ever becomes text nodes, so a reply cannot put markup or scripts into the page.

import { el } from "./dom.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const DELIMITER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Cuts a text into blocks; appended text changes only the last ones, so that a growing reply is cheap to show. */
export function blocks(text) {
  const found = [];
  let lines = [];
  let fence = null;
  const end = () => {
    if (lines.length) found.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line);
    if (fence) {
      lines.push(line);
      if (mark && mark[1].startsWith(fence) && !mark[2]) {
        fence = null;
        end();
      }
    } else if (mark) {
      end();
      fence = mark[1];
      lines.push(line);
    } else if (!line.trim()) {
      end();
    } else {
      const single = HEADING.test(line) || RULE.test(line);
      if (single || (ITEM.test(line) && lines.length && !ITEM.test(lines[0]))) end();
      lines.push(line);
      if (single) end();
    }
  }
  end();
  return found;
}

/** The element of one block; quotes in quotes are told apart down to a few levels. */
export function render(block, depth = 0) {
  const lines = block.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) return code(lines, fence);
  const heading = HEADING.exec(lines[0]);
  if (heading) return el(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2]));
  if (RULE.test(lines[0])) return el("hr");
  if (ITEM.test(lines[0])) return list(lines);
  if (depth < 8 && lines.every((line) => line.startsWith(">"))) {
    const inner = lines.map((line) => line.replace(/^> ?/, "")).join("\n");
    return el("blockquote", {}, ...blocks(inner).map((part) => render(part, depth + 1)));
  }
  if (lines.length > 1 && lines[0].includes("|") && DELIMITER.test(lines[1])) return table(lines);
  return el("p", {}, ...inline(block));
}

function code(lines, [, mark, language]) {
  const last = lines.length > 1 && FENCE.exec(lines.at(-1))?.[1].startsWith(mark);
  const text = lines.slice(1, last ? -1 : undefined).join("\n");
  const copy = el("button", { type: "button", class: "quiet small" }, "Copy");
  copy.addEventListener("click", () => copyText(text, copy));
  const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), copy);
  return el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, el("code", {}, text)));
}

/** Puts text on the clipboard and says so on the button. */
export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = before), 1500);
}

function list(lines) {
  const top = { indent: -1, element: null, item: null };
  const stack = [top];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (!found) {
      stack.at(-1).item.append("\n", ...inline(line.trim()));
      continue;
    }
    const indent = found[1].length;
    while (stack.length > 1 && stack.at(-1).indent > indent) stack.pop();
    if (stack.at(-1).indent < indent) {
      const ordered = /\d/.test(found[2]);
      const element = el(ordered ? "ol" : "ul", ordered ? { start: parseInt(found[2], 10) } : {});
      stack.at(-1).item?.append(element);
      top.element ??= element;
      stack.push({ indent, element, item: null });
    }
    const level = stack.at(-1);
    level.item = el("li", {}, ...inline(found[3]));
    level.element.append(level.item);
  }
  return top.element;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const row = (kind, line) => el("tr", {}, ...cells(line).map((cell) => el(kind, {}, ...cell)));
  const body = lines.slice(2).map((line) => row("td", line));
  return el("div", { class: "table", tabindex: "0" },
    el("table", {}, el("thead", {}, row("th", lines[0])), el("tbody", {}, ...body)));
}

const INLINE = new RegExp(
  [
    /\\([\\`*_[\]()#|~>-])/, // an escape
    /(`+)([^`]|[^`][\s\S]*?[^`])\2(?!`)/, // code
    /\*\*(?=\S)([\s\S]*?\S)\*\*/, // strong
    /\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)/, // emphasis
    /!?\[([^\]\n]+)\]\((https?:\/\/[^\s)]+|mailto:[^\s)]+)\)/, // a link
    /(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"*])/, // an address
  ].map((part) => part.source).join("|"),
  "g",
);

function inline(text) {
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, escaped, , codeText, strong, emphasis, label, target, address] = found;
    if (found.index > at) nodes.push(text.slice(at, found.index));
    at = found.index + whole.length;
    if (escaped !== undefined) nodes.push(escaped);
    else if (codeText !== undefined) nodes.push(el("code", {}, codeText));
    else if (strong !== undefined) nodes.push(el("strong", {}, ...inline(strong)));
    else if (emphasis !== undefined) nodes.push(el("em", {}, ...inline(emphasis)));
    else nodes.push(link(target ?? address, label ?? address));
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

function link(target, label) {
  return el("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, label);
}
