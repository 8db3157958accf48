// Buttons that copy settings from a report.

for (const settings of document.querySelectorAll(".settings")) {
  const [text, button] = [settings.querySelector("code"), settings.querySelector("button")];
  button.hidden = false;
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(text);
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "copied";
    } catch {
      button.textContent = "selected: copy it with Ctrl+C"; // the browser lets no page write to the clipboard
    }
  });
}
