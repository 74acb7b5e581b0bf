(() => {
  const root = document.documentElement, codes = { en: "en", zh: "zh-Hans" };
  const toggle = document.querySelector("[data-switch=language]"), title = document.querySelector("title");
  function stored(value) {
    try {
      if (value) localStorage.setItem("linattn-language", value);
      return localStorage.getItem("linattn-language");
    } catch {
      return null; // pages from disk may have no storage
    }
  }
  function speak(chosen) {
    const other = chosen === "en" ? "zh" : "en", Name = chosen === "en" ? "En" : "Zh";
    root.lang = codes[chosen];
    toggle.dataset.other = other;
    toggle.lang = codes[other];
    toggle.textContent = other === "zh" ? "中文" : "English";
    toggle.setAttribute("aria-label", toggle.textContent);
    document.title = title.dataset[`title${Name}`];
    for (const node of document.querySelectorAll("[data-label-en]")) node.setAttribute("aria-label", node.dataset[`label${Name}`]);
  }
  const asked = new URLSearchParams(location.search).get("lang") ?? stored();
  speak(asked in codes ? asked : navigator.language.startsWith("zh") ? "zh" : "en");
  toggle.addEventListener("click", () => {
    stored(toggle.dataset.other);
    speak(toggle.dataset.other);
  });
})();
