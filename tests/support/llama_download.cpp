// What `llama-cli -hf ORG/NAME:TYPE` resolves and fetches, by llama.cpp's own library: it exports these functions, but
// comes without headers, so what they take is declared here as in its common/download.h and common/hf-cache.h.
//
// Usage: llama_download ORG/NAME[:TYPE]. Prints a line for the model, for each of its files and for the tower: what it
// is, its path in the repository, and where it was fetched to.
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace hf_cache {
struct hf_file {
    std::string path, url, local_path, final_path, oid, repo_id;
};
using hf_files = std::vector<hf_file>;
std::string finalize_file(const hf_file & file);
}  // namespace hf_cache

struct common_params_model {
    std::string path, url, hf_repo, hf_file, docker_repo;
};

struct common_download_opts {
    std::string bearer_token;
    std::vector<std::pair<std::string, std::string>> headers;
    bool offline = false, mmproj = false, mtp = false, eagle3 = false, dflash = false, dspark = false;
    void * callback = nullptr;
};

struct common_download_task {
    common_download_opts opts;
    std::string url, local_path;
    std::function<void()> on_done;
    bool is_hf = false;
};

struct common_download_hf_plan {
    hf_cache::hf_file primary;
    hf_cache::hf_files model_files;
    hf_cache::hf_file mmproj, mtp, eagle3, dflash, dspark, preset;
};

common_download_hf_plan common_download_get_hf_plan(const common_params_model & model, const common_download_opts & opts);
void common_download_run_tasks(const std::vector<common_download_task> & tasks);

int main(int, char ** arguments) {
    common_params_model model;
    model.hf_repo = arguments[1];
    common_download_opts options;
    options.mmproj = true;
    const common_download_hf_plan plan = common_download_get_hf_plan(model, options);
    std::printf("model\t%s\t\n", plan.primary.path.c_str());
    hf_cache::hf_files files = plan.model_files;
    if (!plan.mmproj.path.empty()) files.push_back(plan.mmproj);
    std::vector<common_download_task> tasks;
    for (const auto & file : files) tasks.push_back({options, file.url, file.local_path, nullptr, true});
    common_download_run_tasks(tasks);
    for (const auto & file : files) {
        const char * what = file.path == plan.mmproj.path ? "tower" : "file";
        std::printf("%s\t%s\t%s\n", what, file.path.c_str(), hf_cache::finalize_file(file).c_str());
    }
    return 0;
}
